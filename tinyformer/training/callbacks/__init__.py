"""Lightning callbacks: checkpoints, reports, finite steps, progress, telemetry and training scores."""
