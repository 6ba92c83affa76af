package metrics

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

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

// parse returns the metrics in the answer of a rank. Each has the labels rank and host.
func parse(rank int, host string, text []byte) ([]*dto.MetricFamily, error) {
	if len(text) > maxText {
		return nil, fmt.Errorf("got %d bytes, want at most %d", len(text), maxText)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	named, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("got text that is not in Prometheus's text format: %.200w", err)
	}
	if len(named) == 0 {
		return nil, errors.New("got no metrics")
	}
	own := []*dto.LabelPair{
		{Name: new(labelRank), Value: new(strconv.Itoa(rank))}, {Name: new(labelHost), Value: &host},
	}
	families := make([]*dto.MetricFamily, 0, len(named))
	for _, f := range named {
		families = append(families, f)
		for _, m := range f.Metric {
			m.Label = slices.DeleteFunc(m.Label, func(l *dto.LabelPair) bool {
				return l.GetName() == labelRank || l.GetName() == labelHost
			})
			m.Label = append(m.Label, own...)
			slices.SortFunc(m.Label, func(a, b *dto.LabelPair) int {
				return strings.Compare(a.GetName(), b.GetName())
			})
			// Without the timestamp, Prometheus uses the time of the scrape.
			m.TimestampMs = nil
		}
	}
	return families, nil
}
