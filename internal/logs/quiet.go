package logs

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// At most perTick lines with the same level and message are written in each period of length tick.
	tick    = time.Minute
	perTick = 20
	// leftOut is the name of the field that says how many lines the sampler has dropped.
	leftOut = "left_out"
)

// Quiet returns a logger that writes to log through zap's sampler, so that floods of messages do not fill
// disks. It writes at most 20 lines per minute with the same level and message. The next line that is written
// contains the number of all dropped lines in the field left_out. If no other line is written, Sync writes
// the number. Lines at level Trace are never dropped. Long texts are shortened, and unprintable characters
// are escaped. If log is nil, the new logger writes nothing. If log was already returned by Quiet, Quiet
// returns it unchanged.
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
		below := &core{c, dropped}
		return sampled{below, sync.OnceValue(func() zapcore.Core {
			return zapcore.NewSamplerWithOptions(below, tick, perTick, 0, zapcore.SamplerHook(count))
		})}
	}))
}

// sampled is zap's sampler over a core of this package. The type lets Quiet recognize its own loggers.
type sampled struct {
	zapcore.Core
	// sampler returns the sampler. It has counters of 450 KiB, which are made with the first line, because
	// every rank has such a logger and most ranks never write to it.
	sampler func() zapcore.Core
}

// With implements zapcore.Core.
func (s sampled) With(fields []zapcore.Field) zapcore.Core {
	with := func() zapcore.Core { return s.sampler().With(fields) }
	return sampled{s.Core.With(fields), sync.OnceValue(with)}
}

// Check implements zapcore.Core.
func (s sampled) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if !s.Enabled(e.Level) {
		return ce
	}
	return s.sampler().Check(e, ce)
}

// core shortens and escapes texts. It adds to a line the number of lines that were dropped before it. Loggers
// that With has derived share the counter.
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

// Write implements zapcore.Core. It calls Check of the wrapped core, because that core may consist of several
// cores, and perhaps only some of them accept the entry.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	e.Message = Plain(e.Message)
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

// Sync flushes the wrapped core. If lines were dropped and no line has reported their number yet, Sync first
// writes a line that contains the number.
func (c *core) Sync() error {
	var err error
	if n := c.dropped.Load(); n > 0 {
		err = c.Write(zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(),
			Message: "repeated lines were left out of the log"}, nil)
	}
	return errors.Join(err, c.Core.Sync())
}

// failure collects the errors that zap reports if a line cannot be written.
type failure struct{ err error }

// Write implements zapcore.WriteSyncer.
func (f *failure) Write(b []byte) (int, error) {
	f.err = errors.Join(f.err, errors.New(strings.TrimSpace(string(b))))
	return len(b), nil
}

// Sync implements zapcore.WriteSyncer.
func (f *failure) Sync() error { return nil }
