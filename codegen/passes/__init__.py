"""Passes: functions from loop IR to loop IR, each directed by a mark or by named loops."""
