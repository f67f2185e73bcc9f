"""What a scheduled module runs on: lanes, slabs, the host optimizer, a meter. It executes and decides nothing."""
