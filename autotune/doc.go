// Package autotune finds good settings for a job from measured scores. It only computes: it has no clock, no
// connection, no goroutine and no lock, and does not know what a setting does.
//
// A [Space] lists the parameters that may change, and a [Point] has a value for each of them.
package autotune
