"""What should happen, by the papers and by what engines are known to do? Nothing here imports torch or the study."""
