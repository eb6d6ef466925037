"""What every other room stands on: errors and exit codes, units, durable files, locks, process identity."""
