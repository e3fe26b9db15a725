"""Tables, figures and sentences of the notebooks, and the program that executes the notebooks."""
