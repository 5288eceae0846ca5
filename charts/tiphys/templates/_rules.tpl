{{/* What each component may do, in one place: a test holds it equal to what the components were seen doing. */}}

{{/* Plugin, in each workflow namespace. */}}
{{- define "tiphys.rules.plugin.workflows" -}}
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, delete]
{{- if .Values.nodes.detectLoss }}
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
{{- end }}
{{- include "tiphys.rules.gangs" (dict "root" . "verbs" "[get, delete]") }}
{{- if .Values.gangs.job }}
{{- /* An elastic gang gets further members, and each of its pods a node. */}}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [patch]
{{- end }}
{{- if and (or .Values.gangs.jobSet .Values.gangs.trainJob) (not .Values.gangs.job) }}
{{- /* The Job of a JobSet alone records which member ended first. */}}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get]
{{- end }}
{{- if eq .Values.ledger.kind "kueue" }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues]
  verbs: [get, list]
- apiGroups: [visibility.kueue.x-k8s.io]
  resources: [localqueues/pendingworkloads]
  verbs: [get]
{{- end }}
{{- if eq .Values.mode "agent" }}
- apiGroups: [argoproj.io]
  resources: [workflowtasksets]
  verbs: [get, list, watch]
- apiGroups: [argoproj.io]
  resources: [workflowtasksets/status]
  verbs: [patch]
{{- end }}
{{- end }}

{{/* Plugin, in the namespace of the release. */}}
{{- define "tiphys.rules.plugin.home" -}}
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [kube-root-ca.crt]
  verbs: [get]
{{- if eq .Values.ledger.kind "tiphys" }}
- apiGroups: [tiphys.dev]
  resources: [gpuledgers]
  verbs: [create]
- apiGroups: [tiphys.dev]
  resources: [gpuledgers]
  resourceNames: [default]
  verbs: [get]
- apiGroups: [tiphys.dev]
  resources: [gpuledgers/status]
  resourceNames: [default]
  verbs: [update]
- apiGroups: [tiphys.dev]
  resources: [gpuledgerrecords]
  verbs: [get, list, create, delete]
{{- end }}
{{- if eq .Values.mode "agent" }}
{{ include "tiphys.rules.lease" "tiphys-agent" }}
{{- end }}
{{- end }}

{{/* Plugin, in the whole cluster, behind nodes.observe. */}}
{{- define "tiphys.rules.plugin.nodes" -}}
- apiGroups: [""]
  resources: [nodes, pods]
  verbs: [list, watch]
{{- end }}

{{/* Plugin, in kube-node-lease, behind nodes.detectLoss. */}}
{{- define "tiphys.rules.plugin.nodeLeases" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [list]
{{- end }}

{{/* Plugin, in the whole cluster, with Kueue. */}}
{{- define "tiphys.rules.plugin.kueue" -}}
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors]
  verbs: [get, list]
{{- end }}

{{/* Controller, in each workflow namespace. */}}
{{- define "tiphys.rules.controller.workflows" -}}
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [list, watch]
{{- if or .Values.descriptions.enabled .Values.api.tokenSecret }}
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [patch]
{{- end }}
{{- if include "tiphys.makesWorkflows" . }}
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [get, create]
{{- end }}
{{- if .Values.triggers.sources }}
- apiGroups: [argoproj.io]
  resources: [workflowtemplates]
  verbs: [get, list]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if eq .Values.mode "sidecar" }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
{{- else if include "tiphys.makesGangs" . }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
{{- end }}
{{- include "tiphys.rules.gangs" (dict "root" . "verbs" "[list, delete]") }}
{{- end }}

{{/* Whether the controller makes Workflows: not empty if so. */}}
{{- define "tiphys.makesWorkflows" -}}
{{- if or .Values.autoResume.enabled .Values.api.tokenSecret .Values.triggers.sources }}yes{{ end -}}
{{- end }}

{{/* Controller, in the namespace of the release. */}}
{{- define "tiphys.rules.controller.home" -}}
{{ include "tiphys.rules.lease" "tiphys-controller" }}
{{- if or .Values.janitor.enabled (include "tiphys.makesWorkflows" .) }}
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [kube-root-ca.crt]
  verbs: [get]
{{- end }}
{{- if .Values.janitor.enabled }}
- apiGroups: [tiphys.dev]
  resources: [gpuledgers]
  resourceNames: [default]
  verbs: [get]
- apiGroups: [tiphys.dev]
  resources: [gpuledgerrecords]
  verbs: [get, list]
{{- end }}
{{- end }}

{{/* Lead by a Lease: a name cannot restrict `create`. */}}
{{- define "tiphys.rules.lease" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ . }}]
  verbs: [get, update]
{{- end }}

{{/* Whether workflows may create gangs, of any kind: not empty if so. */}}
{{- define "tiphys.makesGangs" -}}
{{- with .Values.gangs }}{{ if or .job .jobSet .trainJob }}yes{{ end }}{{ end -}}
{{- end }}

{{/* What makes the pods of a training on several nodes. Takes a dict of root and verbs. */}}
{{- define "tiphys.rules.gangs" -}}
{{- with .root.Values.gangs }}
{{- if .job }}
- apiGroups: [batch]
  resources: [jobs]
  verbs: {{ $.verbs }}
{{- end }}
{{- if .jobSet }}
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: {{ $.verbs }}
{{- end }}
{{- if .trainJob }}
- apiGroups: [trainer.kubeflow.org]
  resources: [trainjobs]
  verbs: {{ $.verbs }}
{{- end }}
{{- end }}
{{- end }}

{{/* Argo's containers in the pods of workflows: report what a pod has returned. */}}
{{- define "tiphys.rules.executor" -}}
- apiGroups: [argoproj.io]
  resources: [workflowtaskresults]
  verbs: [create, patch]
{{- end }}

{{/* The pod of Argo that creates a gang and watches it. */}}
{{- define "tiphys.rules.gang" -}}
{{ include "tiphys.rules.executor" . }}
{{- include "tiphys.rules.gangs" (dict "root" . "verbs" "[create, get]") }}
{{- end }}

{{/* Argo's agent pod, in mode sidecar. */}}
{{- define "tiphys.rules.agent" -}}
- apiGroups: [argoproj.io]
  resources: [workflowtasksets]
  verbs: [watch]
- apiGroups: [argoproj.io]
  resources: [workflowtasksets/status]
  verbs: [patch]
{{- end }}

{{/* Web pages, in each workflow namespace. */}}
{{- define "tiphys.rules.ui.workflows" -}}
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- if eq .Values.ledger.kind "kueue" }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads, localqueues]
  verbs: [get, list]
- apiGroups: [visibility.kueue.x-k8s.io]
  resources: [localqueues/pendingworkloads]
  verbs: [get]
{{- end }}
{{- end }}

{{/* Web pages, in the namespace of the release. */}}
{{- define "tiphys.rules.ui.home" -}}
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [kube-root-ca.crt]
  verbs: [get]
- apiGroups: [tiphys.dev]
  resources: [gpuledgers]
  verbs: [get]
- apiGroups: [tiphys.dev]
  resources: [gpuledgerrecords]
  verbs: [get, list]
{{- end }}

{{/* Web pages, in the whole cluster, behind nodes.observe. */}}
{{- define "tiphys.rules.ui.nodes" -}}
- apiGroups: [""]
  resources: [nodes, pods]
  verbs: [list]
{{- end }}
