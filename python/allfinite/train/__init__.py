"""The main job: one small ViT on real images, trained by four recipes that differ in attention and learning rate."""
