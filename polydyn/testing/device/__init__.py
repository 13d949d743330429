"""Hand-written kernels that compare the primitives of ``codegen/device`` with numpy, emulated and on a GPU."""
