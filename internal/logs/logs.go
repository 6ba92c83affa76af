// Package logs makes the loggers of ranks, hvdd and hvdrun (config.Config.Logger), and makes texts of other
// processes safe for a log or a report (Plain). docs/settings.md describes the log for users.
//
// Invariants:
//
//  1. At most 20 lines with the same level and message are written per minute (zap's sampler). The next line
//     that is written says how many lines were dropped.
//  2. Text from a peer or a client can neither make a line longer than a fixed limit nor start a new line.
//  3. At level Trace no entry is dropped, and texts in the fields of an entry are not shortened.
//  4. Logging blocks only on the write to the file. There is no goroutine and no queue.
package logs

import (
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// New returns a logger that writes entries of at least the given level to w. The format is "console" for text
// or "json" for JSON. With any other format, the logger writes text if w is a terminal, and JSON if not. The
// logger writes each line with one call of Write, so other code may write to w too. If lines were dropped
// after the last line that was written, Sync writes their number.
func New(w io.Writer, level zapcore.Level, format string, withTime bool) *zap.Logger {
	// The struct hides the method Sync of w. If w is a pipe, that method would return an error.
	sink := zapcore.Lock(zapcore.AddSync(struct{ io.Writer }{w}))
	core := zapcore.NewCore(newEncoder(isConsole(w, format), withTime), sink, level)
	return Quiet(zap.New(core, zap.ErrorOutput(sink)))
}

// Trace is the level below debug. It is for entries that are logged in each cycle of the negotiation.
const Trace = zapcore.DebugLevel - 1

// Level returns the level for word, a value of HOROVOD_LOG_LEVEL. For an unknown word it returns the warning
// level.
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

// withTrace returns an encoder of levels. For the level Trace, which zap does not know, it writes word. For
// all other levels it calls the encoder others.
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
	if _, is := w.(Stderr); is {
		w = os.Stderr
	}
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

// newEncoder returns an encoder that writes entries as text or as JSON. In both forms, durations have a unit.
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
	c.TimeKey = "time"
	if !withTime {
		c.TimeKey = zapcore.OmitKey
	}
	return zapcore.NewJSONEncoder(c)
}
