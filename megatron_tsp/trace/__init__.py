"""What a rank holds and does: live bytes of its tensors."""
