"""One file a pass; `pipelines` lists them in order."""
