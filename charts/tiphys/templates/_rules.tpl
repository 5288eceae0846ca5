{{/* What each component may do, in one place: a test holds it equal to what the components were seen doing. */}}

{{/* Plugin, in each workflow namespace. */}}
{{- define "tiphys.rules.plugin.workflows" -}}
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
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
{{- if eq .Values.mode "agent" }}
{{ include "tiphys.rules.lease" "tiphys-agent" }}
{{- end }}
{{- end }}

{{/* Controller, in each workflow namespace. */}}
{{- define "tiphys.rules.controller.workflows" -}}
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* Controller, in the namespace of the release. */}}
{{- define "tiphys.rules.controller.home" -}}
{{ include "tiphys.rules.lease" "tiphys-controller" }}
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

{{/* Workflows, in their namespace: what Argo's executor and its agent do under the workflow's account. */}}
{{- define "tiphys.rules.workflow" -}}
- apiGroups: [argoproj.io]
  resources: [workflowtaskresults]
  verbs: [create, patch]
{{- if eq .Values.mode "sidecar" }}
- apiGroups: [argoproj.io]
  resources: [workflowtasksets]
  verbs: [list, watch]
- apiGroups: [argoproj.io]
  resources: [workflowtasksets/status]
  verbs: [patch]
{{- end }}
{{- end }}
