package frame

// Step is step.
const Step = step
