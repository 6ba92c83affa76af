package dial

// FrameStep is frameStep.
const FrameStep = frameStep
