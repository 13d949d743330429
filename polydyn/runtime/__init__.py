"""What runs a compiled program: artifact, native library, calls. Imports numpy and the standard library, no isl."""
