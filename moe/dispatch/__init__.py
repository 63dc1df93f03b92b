"""One module per transport: how tokens reach the ranks that own their experts, and how results return."""
