"""Building: the C compiler, the cache by content, parallel translation units."""
