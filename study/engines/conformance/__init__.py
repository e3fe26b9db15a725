"""Do the engines that are installed here train what they say? A matrix of ways, against a reference without engines."""
