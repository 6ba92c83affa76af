// Package logs makes the loggers of a rank, of hvdd and of hvdrun (config.Config.Logger). docs/logging.md is for users.
//
// Invariants:
//
//  1. At most 20 lines of a level and message are written in a minute (zap's sampler), and the next line that is written tells how
//     many were dropped.
//  2. Whatever a peer or a client has brought into a line, it stays one line of bounded length, and is not taken for the end of it.
//  3. What is logged at Trace is complete: nothing of it is left out.
//  4. Nobody waits for a log but on the file itself: there is no goroutine and no queue.
package logs

import (
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// New returns a logger that writes to w what has at least the given level, as lines for people (format console), as JSON, or,
// for any other format, as lines for people if w is a terminal. Others may write to w too; each line is one Write. Sync of the
// logger tells of lines that were left out.
func New(w io.Writer, level zapcore.Level, format string, withTime bool) *zap.Logger {
	// Without its own Sync, which fails for a pipe.
	sink := zapcore.Lock(zapcore.AddSync(struct{ io.Writer }{w}))
	core := zapcore.NewCore(newEncoder(isConsole(w, format), withTime), sink, level)
	return Quiet(zap.New(core, zap.ErrorOutput(sink)))
}

// Trace is the level below debug, of what each cycle of the negotiation says.
const Trace = zapcore.DebugLevel - 1

// Level returns that of a value of HOROVOD_LOG_LEVEL. A word that config does not accept is warning.
func Level(word string) zapcore.Level {
	switch word {
	case "trace":
		return Trace
	case "debug":
		return zapcore.DebugLevel
	case "info":
		return zapcore.InfoLevel
	case "error":
		return zapcore.ErrorLevel
	case "fatal":
		return zapcore.FatalLevel
	}
	return zapcore.WarnLevel
}

// withTrace encodes levels as others does, and Trace, which zap does not know, as a word.
func withTrace(word string, others zapcore.LevelEncoder) zapcore.LevelEncoder {
	return func(l zapcore.Level, enc zapcore.PrimitiveArrayEncoder) {
		if l == Trace {
			enc.AppendString(word)
			return
		}
		others(l, enc)
	}
}

// IsTerminal reports whether w is a terminal, in front of which people sit.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func isConsole(w io.Writer, format string) bool {
	return format == "console" || format != "json" && IsTerminal(w)
}

// newEncoder makes lines for people, or JSON objects. Durations have their unit in both.
func newEncoder(console, withTime bool) zapcore.Encoder {
	if console {
		c := zap.NewDevelopmentEncoderConfig()
		c.EncodeLevel = withTrace("TRACE", c.EncodeLevel)
		if !withTime {
			c.TimeKey = zapcore.OmitKey
		}
		return zapcore.NewConsoleEncoder(c)
	}
	c := zap.NewProductionEncoderConfig()
	c.EncodeLevel = withTrace("trace", c.EncodeLevel)
	c.EncodeTime, c.EncodeDuration = zapcore.TimeEncoderOfLayout(time.RFC3339Nano), zapcore.StringDurationEncoder
	if c.TimeKey = "time"; !withTime {
		c.TimeKey = zapcore.OmitKey
	}
	return zapcore.NewJSONEncoder(c)
}
