// Package logs makes the loggers of ranks, of hvdd and of hvdrun (config.Config.Logger). Its page for users
// is docs/logging.md.
//
// Invariants:
//
//  1. At most 20 lines of a level and message are written per minute (zap's sampler). The next line that is
//     written has the number of lines that were dropped.
//  2. Text from a peer or a client cannot make an entry longer than a bounded line, nor end the line.
//  3. Entries at Trace are complete: none is dropped, and texts in the fields of the call are not
//     shortened.
//  4. Logging blocks only on the write to the file: there is no goroutine and no queue.
package logs

import (
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// New returns a logger that writes entries of at least the given level to w: as text (format console), as
// JSON (format json) or, for any other format, as text if w is a terminal and else as JSON. Other code may
// write to w too, since each line is one Write. Sync of the logger writes the number of dropped lines.
func New(w io.Writer, level zapcore.Level, format string, withTime bool) *zap.Logger {
	// The struct hides the Sync method of w, which fails for a pipe.
	sink := zapcore.Lock(zapcore.AddSync(struct{ io.Writer }{w}))
	core := zapcore.NewCore(newEncoder(isConsole(w, format), withTime), sink, level)
	return Quiet(zap.New(core, zap.ErrorOutput(sink)))
}

// Trace is the level below debug, for entries on each cycle of the negotiation.
const Trace = zapcore.DebugLevel - 1

// Level returns the level of a value of HOROVOD_LOG_LEVEL. For a word that config does not accept it is
// warning.
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

// withTrace returns an encoder that encodes Trace, which zap does not know, as word, and other levels as
// others does.
func withTrace(word string, others zapcore.LevelEncoder) zapcore.LevelEncoder {
	return func(l zapcore.Level, enc zapcore.PrimitiveArrayEncoder) {
		if l == Trace {
			enc.AppendString(word)
			return
		}
		others(l, enc)
	}
}

// IsTerminal reports whether w is a terminal.
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

// newEncoder returns an encoder of entries as text or as JSON. Both write durations with their unit.
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
	c.EncodeTime, c.EncodeDuration = zapcore.TimeEncoderOfLayout(time.RFC3339Nano),
		zapcore.StringDurationEncoder
	if c.TimeKey = "time"; !withTime {
		c.TimeKey = zapcore.OmitKey
	}
	return zapcore.NewJSONEncoder(c)
}
