package logs

import (
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// tick is the interval in which at most perTick lines of a level and message are written.
	tick    = time.Minute
	perTick = 20
	// leftOut is the field with the number of lines that the sampler has dropped.
	leftOut = "left_out"
)

// Quiet returns log with zap's sampler, for messages that may come in floods and must not fill disks. It
// writes at most 20 lines per minute of each level and message. The next line that is written, or Sync, has
// the number of dropped lines (left_out), of all messages together. Lines at Trace are never dropped. Texts
// have a bounded length, and characters that are not printable are escaped. If log is nil, the result writes
// nothing. A logger that is the result of Quiet is returned unchanged.
func Quiet(log *zap.Logger) *zap.Logger {
	if log == nil {
		return zap.NewNop()
	}
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		if _, ok := c.(sampled); ok {
			return c
		}
		dropped := new(atomic.Int64)
		count := func(_ zapcore.Entry, decision zapcore.SamplingDecision) {
			if decision&zapcore.LogDropped != 0 {
				dropped.Add(1)
			}
		}
		return sampled{zapcore.NewSamplerWithOptions(&core{c, dropped}, tick, perTick, 0,
			zapcore.SamplerHook(count))}
	}))
}

// sampled is a sampler over a core of this package. Quiet recognizes its own loggers by this type.
type sampled struct{ zapcore.Core }

// With implements zapcore.Core.
func (s sampled) With(fields []zapcore.Field) zapcore.Core { return sampled{s.Core.With(fields)} }

// core shortens and escapes texts, and adds the number of lines that were dropped before. Loggers derived by
// With share the counter.
type core struct {
	zapcore.Core
	dropped *atomic.Int64
}

// With implements zapcore.Core.
func (c *core) With(fields []zapcore.Field) zapcore.Core {
	return &core{c.Core.With(bounded(fields, cut)), c.dropped}
}

// Check implements zapcore.Core.
func (c *core) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core. It calls Check of the core below again, because that core may be a tee of
// several, of which only some write the entry.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	e.Message = plain(e.Message)
	shorten := cut
	if e.Level <= Trace {
		shorten = func(text string) string { return text }
	}
	fields = bounded(fields, shorten)
	var failed failure
	ce := c.Core.Check(e, nil)
	if ce == nil {
		return nil
	}
	if n := c.dropped.Swap(0); n > 0 {
		fields = append(fields[:len(fields):len(fields)], zap.Int64(leftOut, n))
	}
	ce.ErrorOutput = &failed
	ce.Write(fields...)
	return failed.err
}

// Sync writes the number of dropped lines if no line has had it yet, and flushes the core below.
func (c *core) Sync() error {
	var err error
	if n := c.dropped.Load(); n > 0 {
		err = c.Write(zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(),
			Message: "repeated lines were left out of the log"}, nil)
	}
	return errors.Join(err, c.Core.Sync())
}

// failure collects the errors that zap reports for a line that could not be written.
type failure struct{ err error }

// Write implements zapcore.WriteSyncer.
func (f *failure) Write(b []byte) (int, error) {
	f.err = errors.Join(f.err, errors.New(strings.TrimSpace(string(b))))
	return len(b), nil
}

// Sync implements zapcore.WriteSyncer.
func (f *failure) Sync() error { return nil }
