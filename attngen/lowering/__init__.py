"""Schedule -> macro calls, by part: context; ops of all targets, of sm80 and of sm90; maps; control; roles; kernel."""
