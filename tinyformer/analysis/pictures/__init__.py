"""Maps, plots and pages."""
