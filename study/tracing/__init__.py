"""What does torch's own memory tracker count in a step of the real model, over tensors without bytes?"""
