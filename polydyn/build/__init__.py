"""Building: C compiler, cache by content, parallel translation units."""
