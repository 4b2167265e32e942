"""Number formats narrower than bfloat16."""
