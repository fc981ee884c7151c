"""What each result says in text, HTML and plain data, one file a kind; no number is made here, and no result imports
its file (`kvdrift.result` has the table that names them)."""
