package metrics

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// maxText limits the bytes of a rank's answer. The longest answer, from rank 0 of the largest job, has about
// 600 KiB.
const maxText = 2 << 20

var (
	errLate  = errors.New("metrics: the ranks did not answer before the scrape timed out")
	errEnded = errors.New("metrics: the job is over")
)

// merger merges the metrics of several ranks into one set of metric families.
type merger struct {
	families map[string]*dto.MetricFamily
	parser   expfmt.TextParser
}

func newMerger() *merger {
	return &merger{families: map[string]*dto.MetricFamily{},
		parser: expfmt.NewTextParser(model.LegacyValidation)}
}

// add adds the answer of a rank. If the answer is not valid, add returns an error and adds nothing.
func (m *merger) add(rank int, host string, text []byte) error {
	if len(text) > maxText {
		return fmt.Errorf("got %d bytes, want at most %d", len(text), maxText)
	}
	// If one label is not UTF-8, Prometheus rejects the metrics of all ranks.
	if !utf8.Valid(text) {
		return errors.New("got text that is not UTF-8")
	}
	families, err := m.parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("got text that is not in Prometheus's text format: %.200w", err)
	}
	if len(families) == 0 {
		return errors.New("got no metrics")
	}
	rankPair := &dto.LabelPair{Name: new(labelRank), Value: new(strconv.Itoa(rank))}
	hostPair := &dto.LabelPair{Name: new(labelHost), Value: &host}
	for name, f := range families {
		if name == upName || strings.HasPrefix(name, jobPrefix) {
			return fmt.Errorf("got metric %.100q, a name that is reserved for the launcher", name)
		}
		if have := m.families[name]; have != nil && have.GetType() != f.GetType() {
			return fmt.Errorf("got metric %.100q of type %v, but other ranks sent type %v", name, f.GetType(),
				have.GetType())
		}
		if with := m.clash(name, f, families); with != "" {
			return fmt.Errorf("got metrics %.100q and %.100q, which share the name of a series", name, with)
		}
		seen := make(map[string]bool, len(f.Metric))
		for _, metric := range f.Metric {
			metric.Label = slices.DeleteFunc(metric.Label, func(l *dto.LabelPair) bool {
				return l.GetName() == labelRank || l.GetName() == labelHost
			})
			metric.Label = append(metric.Label, rankPair, hostPair)
			// Without the timestamp, Prometheus uses the time of the scrape.
			metric.TimestampMs = nil
			key := keyOf(metric.Label)
			if seen[key] {
				return fmt.Errorf("got metric %.100q twice with the same labels", name)
			}
			seen[key] = true
		}
	}
	for name, f := range families {
		if have := m.families[name]; have != nil {
			have.Metric = append(have.Metric, f.Metric...)
		} else {
			m.families[name] = f
		}
	}
	return nil
}

// suffixes has the suffixes in the names of the series that a histogram or summary consists of.
var suffixes = []string{"_bucket", "_sum", "_count"}

// clash returns the name of another metric that has a series with the same name as a series of f, or "" if
// there is none. It searches the metrics that were added and the metrics in others. name is the name of f.
func (m *merger) clash(name string, f *dto.MetricFamily, others map[string]*dto.MetricFamily) string {
	for _, suffix := range suffixes {
		for _, all := range []map[string]*dto.MetricFamily{m.families, others} {
			if all[name+suffix] != nil && hasSuffixes(f) {
				return name + suffix
			}
			if base, cut := strings.CutSuffix(name, suffix); cut && all[base] != nil &&
				hasSuffixes(all[base]) {
				return base
			}
		}
	}
	return ""
}

// hasSuffixes reports whether f is a metric whose series have names with suffixes.
func hasSuffixes(f *dto.MetricFamily) bool {
	return f.GetType() == dto.MetricType_HISTOGRAM || f.GetType() == dto.MetricType_GAUGE_HISTOGRAM ||
		f.GetType() == dto.MetricType_SUMMARY
}

// keyOf sorts labels in place and returns a key. Two lists have the same key if they have the same labels.
func keyOf(labels []*dto.LabelPair) string {
	slices.SortFunc(labels, func(a, b *dto.LabelPair) int {
		return strings.Compare(a.GetName(), b.GetName())
	})
	var key []byte
	for _, l := range labels {
		key = strconv.AppendQuote(append(append(key, l.GetName()...), '='), l.GetValue())
	}
	return string(key)
}

// with returns the metrics of the ranks together with the metrics in others, sorted by name. add has made
// sure that no rank uses a name that is in others.
func (m *merger) with(others []*dto.MetricFamily) []*dto.MetricFamily {
	for _, f := range others {
		m.families[f.GetName()] = f
	}
	all := make([]*dto.MetricFamily, 0, len(m.families))
	for _, name := range slices.Sorted(maps.Keys(m.families)) {
		all = append(all, m.families[name])
	}
	return all
}
