"""The three levels: graph (mathematics), program (tiles), schedule (time and warps)."""
