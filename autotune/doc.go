// Package autotune finds good settings for a job from measured scores. It only computes: it has no clock, no
// connection, no goroutine and no lock, and does not know what a setting does.
//
// A [Space] lists the parameters that may change, and a [Point] has a value for each of them. A [Tuner] says
// with which point to run next ([Tuner.Next]) and is told how fast the program was ([Tuner.Step]). When it is
// done, [Tuner.Best] is the point to keep. Rank 0 decides and the other ranks follow, so only rank 0 has a
// Tuner.
//
// # Measurement
//
//   - A sample is StepsPerSample steps. Its score is bytes per microsecond. The first step after each change
//     of the point is discarded, because it fills caches again. The first WarmupSamples samples are discarded
//     too.
//   - A round measures one point. Its score is the median of up to three samples, so that one slow sample, for
//     example during a checkpoint, does no harm. Horovod takes five samples. More
//     samples help less than more points, because the model averages noise over neighbouring points. A round
//     ends after two samples if both are more than 10 % worse than the best score.
//   - The first round measures the defaults. The next rounds measure points that are spread over the space.
//     Then a model proposes points.
//   - The search ends after MaxRounds rounds, when all points were tried, or when the model expects an
//     improvement of less than 0.3 % three times in succession.
//   - At the end the best two points and the defaults are measured again, in turns. The winner is the result.
//     So the result is not worse than the defaults, except for the noise of this comparison.
//
// # Model
//
// The model is a Gaussian process for the logarithm of the score, and the proposal is the point with the
// greatest expected improvement, as in Horovod. Unlike in Horovod, one model has all parameters. So 20 rounds
// are enough for all of them, while Horovod repeats the search for each combination of its switches. Numbers
// have logarithmic scales, and the value 0 is one step before the least other value. Choices and switches
// have no order: two values are equal or different.
//
// # Invariants
//
//  1. A fixed parameter has its default in every point.
//  2. The first point is the defaults.
//  3. With the same space, options and scores a Tuner proposes the same points on all machines of one
//     architecture.
//  4. A score that is not a positive finite number changes nothing.
//
// # Use in the engine
//
// Package internal/tuning at rank 0 makes a space of the settings that exist in the job, with the values in
// force as defaults, and fixes those that the user has set. When the coordinator has granted an operation of
// the same tensor again, a training step has ended. Then the package calls Step with the bytes that were
// reduced since the last step and the time since then. If Step reports true and Next has changed, the
// coordinator puts the new values into its next cycle. Each rank applies them when it applies the cycle, so
// that all ranks change them between the same two operations. After each round the package rewrites the log
// ([Tuner.WriteLog]), and at the end it writes the settings to a file ([Save]), which a later job can read
// ([Load]).
//
// The last sample of a round takes some milliseconds of computation, for the model.
package autotune
