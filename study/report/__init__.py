"""How do records become pages: words, tables, figures, and the site that they make?"""
