"""Wire models: what requests may hold and what answers look like. They know no engine."""
