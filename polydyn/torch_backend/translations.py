def table(): return {}
