"""What every model must survive: captured, profiled, planned, applied, equal."""
