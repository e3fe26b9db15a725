"""Pages made of records: tables, figures, and the site that they make."""
