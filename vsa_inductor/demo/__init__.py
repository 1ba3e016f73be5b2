"""The main job: train a video transformer on a real clip, its sparse attention inside one compiled region.

Rooms: `clip` reads frames, `latents` turns them into latents, `training` builds the model and runs the steps, `picture`
draws, `main` puts them together. Only `python -m vsa_inductor demo` imports this package: its needs (PyAV, diffusers,
matplotlib, tqdm) are the `demo` extra.
"""
