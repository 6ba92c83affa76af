package bootstrap

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/gohvd/gohvd/internal/testnet"
)

// manifests is the folder of the manifests for Kubernetes.
const manifests = "../../deploy/kubernetes"

// The types in this file have the fields of Kubernetes and Kubeflow that the manifests use. A field with
// another name fails the test, because Kubernetes would refuse or ignore it.
type object struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name string }
	Spec       spec
}

// spec has the fields of the specs of a Service, a Job, a PyTorchJob and an MPIJob.
type spec struct {
	ClusterIP                string `yaml:"clusterIP"`
	PublishNotReadyAddresses bool   `yaml:"publishNotReadyAddresses"`
	Selector                 map[string]string

	CompletionMode string `yaml:"completionMode"`
	Completions    int
	Parallelism    int
	BackoffLimit   *int `yaml:"backoffLimit"`
	Template       podTemplate

	RunPolicy struct {
		CleanPodPolicy string `yaml:"cleanPodPolicy"`
		BackoffLimit   int    `yaml:"backoffLimit"`
	} `yaml:"runPolicy"`
	PyTorchReplicaSpecs    map[string]replicas `yaml:"pytorchReplicaSpecs"`
	SlotsPerWorker         int                 `yaml:"slotsPerWorker"`
	SSHAuthMountPath       string              `yaml:"sshAuthMountPath"`
	LauncherCreationPolicy string              `yaml:"launcherCreationPolicy"`
	MPIReplicaSpecs        map[string]replicas `yaml:"mpiReplicaSpecs"`
}

type replicas struct {
	Replicas      int
	RestartPolicy string `yaml:"restartPolicy"`
	Template      podTemplate
}

type podTemplate struct {
	Spec struct {
		Subdomain             string
		RestartPolicy         string `yaml:"restartPolicy"`
		ShareProcessNamespace bool   `yaml:"shareProcessNamespace"`
		Containers            []container
		Volumes               []struct {
			Name   string
			Secret *struct {
				SecretName  string `yaml:"secretName"`
				DefaultMode int    `yaml:"defaultMode"`
			}
			EmptyDir *struct {
				Medium    string
				SizeLimit string `yaml:"sizeLimit"`
			} `yaml:"emptyDir"`
		}
	}
}

type container struct {
	Name, Image string
	Command     []string
	Env         []struct{ Name, Value string }
	Resources   struct {
		Requests, Limits struct{ CPU, Memory string }
	}
	VolumeMounts []struct {
		Name      string
		MountPath string `yaml:"mountPath"`
		ReadOnly  bool   `yaml:"readOnly"`
	} `yaml:"volumeMounts"`
}

// readManifest returns the objects in a manifest.
func readManifest(t *testing.T, name string) (all []object) {
	t.Helper()
	text := testnet.ReadFile(t, filepath.Join(manifests, name))
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	for {
		var o object
		switch err := d.Decode(&o); {
		case errors.Is(err, io.EOF):
			return all
		case err != nil:
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, o)
	}
}

// check returns the only container of a pod and its variables. It checks that the pod's volumes are mounted,
// and that the secret of the job, if there is one, is a file in one of them that only its user can read. A
// pod with the secret runs a rank.
func (p podTemplate) check(t *testing.T, wantSecret bool) (container, environment) {
	t.Helper()
	if len(p.Spec.Containers) != 1 {
		t.Fatalf("got %d containers, want 1", len(p.Spec.Containers))
	}
	c := p.Spec.Containers[0]
	env := environment{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	mounts := make(map[string]string)
	for _, m := range c.VolumeMounts {
		mounts[m.Name] = m.MountPath
	}
	secretDir := ""
	for _, v := range p.Spec.Volumes {
		path, ok := mounts[v.Name]
		if delete(mounts, v.Name); !ok || (v.Secret == nil) == (v.EmptyDir == nil) {
			t.Errorf("volume %s: mounted: %v, want it mounted, with one source", v.Name, ok)
		}
		if v.Secret != nil {
			secretDir = path
			if v.Secret.DefaultMode != 0o400 || v.Secret.SecretName == "" {
				t.Errorf("volume %s: got %+v, want a secret with mode 0400", v.Name, *v.Secret)
			}
		}
	}
	if len(mounts) > 0 {
		t.Errorf("mounts %v have no volume", mounts)
	}
	if got := env["HVD_SECRET_FILE"]; wantSecret && (secretDir == "" || filepath.Dir(got) != secretDir) {
		t.Errorf("HVD_SECRET_FILE is %q, want a file in the volume at %q", got, secretDir)
	}
	// The kernel drops a SIGTERM to process 1 that has no handler, as a rank has none.
	if wantSecret && !p.Spec.ShareProcessNamespace {
		t.Error("the rank is process 1 of its pod, so SIGTERM would not end it")
	}
	if c.Image == "" || len(c.Command) == 0 || c.Resources.Limits.Memory == "" {
		t.Errorf("got %+v, want an image, a command and a limit for memory", c)
	}
	return c, env
}

// The pods of the Indexed Job recognise their ranks, and meet at the name that the service gives to pod 0.
func TestIndexedJob(t *testing.T) {
	all := readManifest(t, "indexed-job.yaml")
	if len(all) != 2 || all[0].Kind != "Service" || all[0].APIVersion != "v1" || all[1].Kind != "Job" ||
		all[1].APIVersion != "batch/v1" {
		t.Fatalf("got %+v, want a Service and a Job", all)
	}
	service, job := all[0], all[1]
	if s := service.Spec; s.ClusterIP != "None" || !s.PublishNotReadyAddresses || len(s.Selector) != 1 ||
		s.Selector["job-name"] != job.Metadata.Name {
		t.Errorf("got %+v, want a headless service with the pods of job %s, ready or not", s,
			job.Metadata.Name)
	}
	s := job.Spec
	if s.CompletionMode != "Indexed" || s.Completions != s.Parallelism || s.BackoffLimit == nil ||
		s.Template.Spec.RestartPolicy != "Never" || s.Template.Spec.Subdomain != service.Metadata.Name {
		t.Errorf("got %+v, want an indexed job, all of whose pods run at once, in the domain of the service", s)
	}
	_, env := s.Template.check(t, true)
	for i := range s.Completions {
		index := strconv.Itoa(i)
		e := detect(t, env.with("JOB_COMPLETION_INDEX", index, "HOSTNAME", job.Metadata.Name+"-"+index))
		want := fmt.Sprintf("at a store of rank 0, %s-0.%s:%d", job.Metadata.Name, service.Metadata.Name,
			KubernetesPort)
		where, _ := e.Where("", 0)
		if e.Kind != Kubernetes || e.Rank != i || e.Size != s.Completions || where != want {
			t.Errorf("pod %d is rank %d of %d under %s and meets %s, want rank %d of %d, %s", i, e.Rank, e.Size,
				e.Kind, where, i, s.Completions, want)
		}
	}
}

// With the variables of Kubeflow's operator, the pods of the PyTorchJob meet at its master.
func TestPyTorchJob(t *testing.T) {
	all := readManifest(t, "pytorchjob.yaml")
	if len(all) != 1 || all[0].Kind != "PyTorchJob" || all[0].APIVersion != "kubeflow.org/v1" {
		t.Fatalf("got %+v, want a PyTorchJob", all)
	}
	specs := all[0].Spec.PyTorchReplicaSpecs
	size := specs["Master"].Replicas + specs["Worker"].Replicas
	if len(specs) != 2 || specs["Master"].Replicas != 1 {
		t.Fatalf("got %+v, want one master, and workers", specs)
	}
	for name, r := range specs {
		c, env := r.Template.check(t, true)
		if c.Name != "pytorch" || r.RestartPolicy != "Never" {
			t.Errorf("%s: got container %q and restarts %q, want pytorch and Never", name, c.Name,
				r.RestartPolicy)
		}
		e := detect(t, env.with("RANK", "1", "WORLD_SIZE", strconv.Itoa(size), "MASTER_ADDR",
			"train-master-0", "MASTER_PORT", "23456"))
		if e.Kind != Plain || e.Size != size {
			t.Errorf("%s: got %d ranks under %s, want %d under %s", name, e.Size, e.Kind, size, Plain)
		}
	}
}

// The launcher of the MPIJob runs hvdrun with the operator's hostfile. Its workers run sshd.
func TestMPIJob(t *testing.T) {
	all := readManifest(t, "mpijob.yaml")
	if len(all) != 1 || all[0].Kind != "MPIJob" || all[0].APIVersion != "kubeflow.org/v2beta1" {
		t.Fatalf("got %+v, want an MPIJob", all)
	}
	s := all[0].Spec
	launcher, worker := s.MPIReplicaSpecs["Launcher"], s.MPIReplicaSpecs["Worker"]
	if len(s.MPIReplicaSpecs) != 2 || launcher.Replicas != 1 || worker.Replicas < 1 || s.SlotsPerWorker < 1 ||
		s.SSHAuthMountPath != "/root/.ssh" || s.LauncherCreationPolicy != "WaitForWorkersReady" {
		t.Errorf("got %+v, want one launcher after workers with slots, and the keys of root", s)
	}
	c, _ := launcher.Template.check(t, false)
	if len(c.Command) < 3 || c.Command[0] != "hvdrun" || c.Command[1] != "--hostfile" ||
		c.Command[2] != "/etc/mpi/hostfile" {
		t.Errorf("the launcher runs %q, want hvdrun with the operator's hostfile", c.Command)
	}
	w, _ := worker.Template.check(t, false)
	if w.Command[0] != "/usr/sbin/sshd" || w.Image != c.Image {
		t.Errorf("the worker runs %q of image %s, want sshd of image %s", w.Command, w.Image, c.Image)
	}
}
