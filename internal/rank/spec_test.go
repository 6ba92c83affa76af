package rank

import (
	"reflect"
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
)

// TestSpecEqual changes each field of a Spec, and checks that Equal sees it and that Clone copies it.
func TestSpecEqual(t *testing.T) {
	s := Spec{Name: "x", Splits: []int64{1, 2}, Tensors: []TensorSpec{{1, tensor.Shape{2, 3}}, {2, nil}}}
	differs := func(what string, change func(c *Spec)) {
		c := s.Clone()
		if !c.Equal(&s) {
			t.Fatalf("the clone is %+v, want %+v", c, s)
		}
		change(&c)
		if again := c.Clone(); c.Equal(&s) || s.Equal(&c) || !again.Equal(&c) {
			t.Errorf("after a change of %s: %+v is equal to %+v, or its clone %+v is not", what, c, s, again)
		}
	}
	for i := range reflect.TypeFor[Spec]().NumField() {
		name := reflect.TypeFor[Spec]().Field(i).Name
		differs(name, func(c *Spec) {
			switch f := reflect.ValueOf(c).Elem().Field(i); f.Kind() {
			case reflect.Uint32:
				f.SetUint(7)
			case reflect.Int:
				f.SetInt(7)
			case reflect.Float64:
				f.SetFloat(7)
			case reflect.Bool:
				f.SetBool(true)
			case reflect.String:
				f.SetString("y")
			case reflect.Slice:
				f.SetLen(1)
			default:
				t.Errorf("field %s is of kind %v", name, f.Kind())
			}
		})
	}
	differs("a split", func(c *Spec) { c.Splits[1] = 7 })
	differs("a type", func(c *Spec) { c.Tensors[1].DType = 7 })
	differs("a dimension", func(c *Spec) { c.Tensors[0].Shape[1] = 7 })
	differs("a shape", func(c *Spec) { c.Tensors[1].Shape = tensor.Shape{1} })
}
