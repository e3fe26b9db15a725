"""Make tables, figures and sentences for the notebooks, and execute the notebooks."""
