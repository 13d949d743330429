"""The search spaces of the papers: rKernel (TSCompiler), micro-kernel (DietCode), uKernel (FTuner), loops (Vortex)."""
