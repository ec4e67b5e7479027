"""Schedule -> macro calls, by part: context, ops, maps, small kernels, control, kernel."""
