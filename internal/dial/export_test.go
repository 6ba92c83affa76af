package dial

// FrameStep makes frameStep available to tests.
const FrameStep = frameStep
