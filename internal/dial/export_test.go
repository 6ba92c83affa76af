package dial

// FrameStep lets tests use frameStep.
const FrameStep = frameStep
