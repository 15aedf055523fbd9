"""Models that leave: a folder that torch and safetensors alone can serve from. See `gem_core.export.package`."""
