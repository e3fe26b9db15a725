"""Doctor: what anybody's accelerate file or DeepSpeed JSON, and this machine, will really do; what to write instead."""
