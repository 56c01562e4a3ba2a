NOUNS = ["cup", "plate", "bowl", "spoon", "towel", "pillow", "basket", "candle", "frame", "kettle", "mug", "tray"]
