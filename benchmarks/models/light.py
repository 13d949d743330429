LIGHT_MODELS={}
def redraw(n): raise NotImplementedError
