"""What several figures share: looks, axes, curves, menus, labels and the sentence over each; no figure stands here."""
