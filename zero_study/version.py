"""Define the version of this project, and the address of its repository."""

__version__ = "0.1.0"

# https://github.com/OWNER/NAME, or empty as long as the project is not published. Everything that shows the address is
# written from this line by tools/derive/address.py.
REPOSITORY = ""
