"""Where rows of text come from."""
