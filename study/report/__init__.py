"""Tables, figures and sentences for the notebooks, and the functions that execute the notebooks."""
