"""What a figure shows (`model`), and how matplotlib draws it (`draw`); a report's page draws the same by its script."""
