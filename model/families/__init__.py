"""What differs between model families: modules, settings and tensor names."""
